"""Messages of a chat as templates receive them, and the text of those that follow the model's own."""
