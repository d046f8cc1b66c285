"""The cost model held against published figures."""
