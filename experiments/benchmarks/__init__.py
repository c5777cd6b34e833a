"""One script per claim about speed; each states the bar it is held to."""
