"""Executes step plans on the device."""
