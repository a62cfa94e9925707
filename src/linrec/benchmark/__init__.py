"""`python -m linrec.benchmark`: what linrec costs, beside what one would take instead."""
