"""Events of a run -> its report. Sees only events and text of units; opens no weights."""
