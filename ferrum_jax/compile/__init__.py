"""The shapes that steps are compiled for, the programs, which of them serve a batch, and where they are kept."""
