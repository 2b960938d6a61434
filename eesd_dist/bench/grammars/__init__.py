"""`eesd bench grammars`: whether texts match their grammars, and what that costs."""
