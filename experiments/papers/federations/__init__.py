"""One rule for every federation: rates, and the largest deficits."""
