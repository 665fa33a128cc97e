"""How many mutants fixed tolerances let pass, whose answers the suite's budgets refuse."""
