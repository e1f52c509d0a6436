"""Decides what runs in each step. No torch, no clock, no I/O."""
