"""The grammars that hold a model to right calls, made of its format and the tools' schemas."""
