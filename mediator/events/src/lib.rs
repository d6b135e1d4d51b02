//! The daemon's event log: changes to virtual machines, tenants, cards and the daemon, with time and author.
//!
//! Modules: [`NewEvent`], [`Log`] (stores events, and returns pages of them), `shelf` (bounded storage), `limits`
//! (bounds the events about one subject), `cursor` (positions in the log), [`author`] (the author of a change, passed
//! with the request from thread to thread), [`Observer`] (derives events by comparing states of the daemon), [`http`]
//! (`GET /v1/events`).
//!
//! Adding an event holds one lock briefly and never waits for readers. Memory is bounded: the log holds at most 4,096
//! events and 2 MiB, and the only state of a reader is its cursor. A subject that causes many events loses its own
//! oldest events first ([decision 140](../../../docs/decisions/140-events.md)).
//!
//! The crate does not write events to a file, and is not a replacement for the debug log.

#![forbid(unsafe_code)]

pub mod author;
mod cursor;
mod event;
pub mod http;
mod limits;
mod log;
mod observer;
mod shelf;
mod time;
mod words;

pub use cursor::BadCursor;
pub use event::NewEvent;
pub use log::{Log, SavedLog};
pub use observer::{Observer, States};
pub use time::rfc3339;
pub use words::{changed, changed_in};
