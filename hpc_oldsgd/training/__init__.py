"""The training loop: rounds, votes, rows of metrics, --tau auto."""
