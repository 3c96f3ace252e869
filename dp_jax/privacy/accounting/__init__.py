"""From events to an epsilon: the accountants, and what their answers leave out."""
