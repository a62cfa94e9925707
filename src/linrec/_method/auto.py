from jaxtyping import Array

from .._inputs import Inputs
from .base import AbstractMethod
from .chunked import Chunked


class Auto(AbstractMethod):
    """The default. Chooses by a fixed rule, which can be asked: `Auto().select(inputs)`.

    - [`linrec.Chunked`][] everywhere.

    It chooses, it does not try: an error of the chosen method is the caller's to see.
    """

    def select(self, inputs: Inputs) -> AbstractMethod:
        del inputs
        return Chunked()

    def unsupported(self, inputs: Inputs) -> str | None:
        return self.select(inputs).unsupported(inputs)

    def __call__(self, inputs: Inputs) -> tuple[Array, Array]:
        return self.select(inputs)(inputs)
