"""What is checked, one module a section; `setting.Section` names them in order."""
