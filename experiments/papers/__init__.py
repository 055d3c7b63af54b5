"""Tables of papers: declarations, finished cells, and reports beside the papers' numbers."""
