"""Sections of the check, one module each; `setting.SECTIONS` lists them in order."""
