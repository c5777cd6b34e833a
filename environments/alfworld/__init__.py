"""ALFWorld's household games in text, and games of the same form."""
