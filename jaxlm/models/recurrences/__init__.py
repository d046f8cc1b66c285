"""Recurrences of mixers: what `jaxlm.models.doors.scan` carries through the tokens of documents."""
