"""Sources that definitions and solutions carry as text: each runs where only its imports are."""
