"""The APIs that generate or convert text, one file each: fields, handler, and answers."""
