//! The daemon's log of events: what has happened to virtual machines, tenants, cards and the daemon, when, and by whom.
//!
//! Parts: [`Log`] (adds events, returns pages of them), `shelf` (the bounded storage), `limits` (bounds the events of
//! one subject), `cursor` (a place in the log), [`author`] (the originator of a change, which follows the request from
//! thread to thread), [`Observer`] (finds events by comparing states of the daemon), [`http`] (`GET /v1/events`).
//!
//! Adding an event takes one lock for a short time and never waits for a reader. Memory is bounded: the log has at most
//! [`MAX_EVENTS`] events and [`MAX_BYTES`], a reader only has its cursor. A subject that causes many events loses its
//! own oldest ones first ([decision 140](../../../docs/decisions/140-events.md)).
//!
//! The crate does not write events to a file, and does not replace the log for people who look for causes in the code.

#![forbid(unsafe_code)]

pub mod author;
mod cursor;
pub mod http;
mod limits;
mod log;
mod observer;
mod shelf;
mod time;
mod words;

pub use cursor::BadCursor;
pub use log::{Log, NewEvent, SavedLog};
pub use observer::{Observer, States};
pub use shelf::{MAX_BYTES, MAX_EVENTS};
pub use words::{changed, changed_in};
