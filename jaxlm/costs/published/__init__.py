"""The cost model compared with published figures."""
