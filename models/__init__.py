"""Networks, their weights, their tokenizers and their feature code. Docstring only, see DESIGN in README."""
