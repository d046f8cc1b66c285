"""The mathematics of recurrent mixers: what `jaxlm.models.doors.scan` carries through the tokens of documents."""
