"""Tables and figures of papers, made again: declarations, the cells that are finished, and ours beside the paper's."""
