"""The three input modes: how conversations, text or token ids of rows are read and continued."""
