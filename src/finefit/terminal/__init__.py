"""A run and a plan on the terminal. Sees only events, plans as JSON, and text of units."""
