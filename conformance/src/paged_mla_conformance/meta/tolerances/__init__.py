"""Count the mutants that fixed tolerances accept and the suite's budgets refuse."""
