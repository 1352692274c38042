"""SGLang logs of any release: text in, typed events and tables out."""
