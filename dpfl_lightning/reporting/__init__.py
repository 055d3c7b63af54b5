"""Reports of a run: MLflow, figures, progress in the terminal and the guarantee page. They only watch a run."""
