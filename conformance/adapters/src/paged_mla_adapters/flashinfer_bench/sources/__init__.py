"""Sources that definitions and solutions contain as text; each needs only its imports."""
