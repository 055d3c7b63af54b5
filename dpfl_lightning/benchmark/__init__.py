"""What `python -m dpfl_lightning.bench` measures, and how."""
