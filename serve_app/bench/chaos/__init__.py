"""`eesd bench chaos`: streams while processes die, hang and lose their links."""
