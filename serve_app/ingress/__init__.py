"""The HTTP deployment: requests go out to pipelines, emissions come back."""
