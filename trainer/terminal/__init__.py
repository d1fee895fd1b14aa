"""Text for people: the console, standard output and error, and units of numbers."""
