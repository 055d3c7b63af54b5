"""The harness of an audit: real engines over made-up records, and what their releases say about a claim."""
