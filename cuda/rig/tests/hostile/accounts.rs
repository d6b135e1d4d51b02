//! Memory and time beyond what the accounts say: the owner notices, charges and reports it.
