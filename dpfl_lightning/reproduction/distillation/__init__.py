"""The distillation paper: what its method is compared with."""
