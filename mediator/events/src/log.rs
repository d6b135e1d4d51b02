//! The log: adds events, and returns pages of them.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use api::{Author, Event, EventPage};
use locks::{Mutex, rank};
use tokio::sync::watch;

use crate::author;
use crate::cursor::{BadCursor, Cursor};
use crate::event::NewEvent;
use crate::limits::Limits;
use crate::shelf::Shelf;
use crate::time::rfc3339;

/// Maximum length of an event's text in bytes; longer texts are truncated.
const MAX_TEXT: usize = 1024;
/// Maximum number of events deferred while the log is handed over.
const MAX_DEFERRED: usize = 64;

/// Mutable state of the log.
#[derive(Debug)]
struct Books {
    /// Time at which the log was started, in ms since 1970.
    epoch: u64,
    /// Total number of events so far.
    count: u64,
    shelf: Shelf,
    limits: Limits,
    /// Events deferred while the log is frozen; `None` if it is not frozen.
    deferred: Option<Vec<(NewEvent, Author, u64)>>,
}

/// State whose changes wake followers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct News {
    /// Total number of events so far.
    pub count: u64,
    /// True if the daemon is exiting.
    pub closed: bool,
}

/// The log of events.
#[derive(Debug)]
pub struct Log {
    began: Instant,
    books: Mutex<rank::Events, Books>,
    news: watch::Sender<News>,
}

impl Default for Log {
    fn default() -> Self {
        Self::new()
    }
}

impl Log {
    /// Creates an empty log.
    #[must_use]
    pub fn new() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self::with(u64::try_from(since.as_millis()).unwrap_or(0), 0, Shelf::default())
    }

    fn with(epoch: u64, count: u64, shelf: Shelf) -> Self {
        let books = Books { epoch, count, shelf, limits: Limits::default(), deferred: None };
        Self {
            began: Instant::now(),
            books: Mutex::new(books),
            news: watch::Sender::new(News { count, closed: false }),
        }
    }

    /// Adds an event with this thread's author (see [`author::acting`]). May suppress the event if its subject causes
    /// many events.
    pub fn add(&self, event: NewEvent) {
        self.add_at(event, author::current(), self.began.elapsed());
    }

    fn add_at(&self, event: NewEvent, author: Author, now: Duration) {
        let mut books = self.books.lock();
        books.report_suppressed(now);
        if let Some((event, author)) = books.limits.admit(event, author, now) {
            books.put(event, author, 0);
        }
        self.tell(&books);
    }

    /// Reports suppressed events whose window has ended. Must be called regularly.
    pub fn tick(&self) {
        let mut books = self.books.lock();
        books.report_suppressed(self.began.elapsed());
        self.tell(&books);
    }

    /// Wakes followers, which then read the log themselves.
    fn tell(&self, books: &Books) {
        let count = books.count;
        self.news.send_if_modified(|news| std::mem::replace(&mut news.count, count) != count);
    }

    /// Returns up to `limit` events after a cursor, or from the oldest event if `after` is `None`.
    ///
    /// # Errors
    /// Returns an error if the text is not a cursor, or if it is beyond the last event.
    pub fn page(&self, after: Option<&str>, limit: usize) -> Result<EventPage, BadCursor> {
        let after: Option<Cursor> = after.map(str::parse).transpose()?;
        let books = self.books.lock();
        let (epoch, count) = (books.epoch, books.count);
        let restarted = after.is_some_and(|after| after.epoch != epoch);
        let from = after.filter(|after| after.epoch == epoch).map_or(0, |after| after.count);
        if from > count {
            let [asked, last] = [from, count].map(|count| Cursor { epoch, count }.to_string());
            return Err(BadCursor::Ahead(asked, last));
        }
        let found = books.shelf.after(epoch.saturating_add(from), limit);
        drop(books);
        let last = found.last().filter(|_| found.len() >= limit).map(|event| event.number.saturating_sub(epoch));
        let end = last.unwrap_or(count);
        let lost = (end - from).saturating_sub(found.len() as u64);
        Ok(EventPage {
            events: found.iter().map(|event| Event::clone(event)).collect(),
            next: Cursor { epoch, count: end }.to_string(),
            lost,
            restarted,
            note: note(epoch, after.is_some(), restarted, lost),
        })
    }

    /// Returns a receiver that is notified of new events.
    pub(crate) fn news(&self) -> watch::Receiver<News> {
        self.news.subscribe()
    }

    /// Disconnects all followers. Called when the daemon is about to exit, because the daemon does not wait for
    /// followers.
    pub fn close(&self) {
        self.news.send_modify(|news| news.closed = true);
    }

    /// Returns the log for the next daemon, which continues the numbering. Defers further events until [`Self::thaw`].
    #[must_use]
    pub fn freeze(&self) -> SavedLog {
        let mut books = self.books.lock();
        books.deferred.get_or_insert_default();
        let events = books.shelf.after(0, usize::MAX);
        let events = events.iter().map(|event| serde_json::to_string(&**event).unwrap_or_default()).collect();
        SavedLog { epoch: books.epoch, count: books.count, events }
    }

    /// Adds the events deferred since [`Self::freeze`]. Called if the next daemon did not take over.
    pub fn thaw(&self) {
        let mut books = self.books.lock();
        for (event, author, suppressed) in books.deferred.take().unwrap_or_default() {
            books.put(event, author, suppressed);
        }
        self.tell(&books);
    }

    /// Restores the log handed over by an earlier daemon. Unreadable events count as lost.
    #[must_use]
    pub fn restored(saved: SavedLog) -> Self {
        let SavedLog { epoch, count, events } = saved;
        let mut shelf = Shelf::default();
        let mut last = epoch;
        for event in events.iter().filter_map(|text| serde_json::from_str::<Event>(text).ok()) {
            if event.number > last && event.number <= epoch.saturating_add(count) {
                last = event.number;
                shelf.add(event);
            }
        }
        Self::with(epoch, count, shelf)
    }
}

/// A log that one daemon hands over to the next.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct SavedLog {
    epoch: u64,
    count: u64,
    /// The events as JSON, because their keys may differ between the daemons.
    events: Vec<String>,
}

impl Books {
    fn report_suppressed(&mut self, now: Duration) {
        for (event, author, suppressed) in self.limits.ended(now) {
            self.put(event, author, suppressed);
        }
    }

    fn put(&mut self, event: NewEvent, author: Author, suppressed: u64) {
        if let Some(deferred) = &mut self.deferred {
            if deferred.len() < MAX_DEFERRED {
                deferred.push((event, author, suppressed));
            }
            return;
        }
        let NewEvent { kind, subject, mut text, card, waited } = event;
        if text.len() > MAX_TEXT {
            text.truncate(text.floor_char_boundary(MAX_TEXT));
            text.push('…');
        }
        self.count += 1;
        let (epoch, count) = (self.epoch, self.count);
        self.shelf.add(Event {
            cursor: Cursor { epoch, count }.to_string(),
            number: epoch.saturating_add(count),
            at: rfc3339(SystemTime::now()),
            kind,
            subject,
            card,
            author,
            text,
            waited_ms: waited.map(|waited| u64::try_from(waited.as_millis()).unwrap_or(u64::MAX)),
            suppressed,
        });
    }
}

/// Describes the events that a reader has missed.
fn note(epoch: u64, has_cursor: bool, restarted: bool, lost: u64) -> Option<String> {
    let begin = || rfc3339(UNIX_EPOCH + Duration::from_millis(epoch));
    let gone = (lost > 0).then(|| match has_cursor {
        true if !restarted => {
            format!("{lost} events after the cursor are lost: the log has space only for newer events")
        }
        _ => format!("{lost} events since {} are lost: the log has space only for newer events", begin()),
    });
    let restart = restarted.then(|| {
        format!(
            "the cursor is from a daemon that has exited: its events after the cursor are lost, and this log begins at {}",
            begin()
        )
    });
    let parts: Vec<String> = restart.into_iter().chain(gone).collect();
    (!parts.is_empty()).then(|| parts.join("; "))
}

#[cfg(test)]
mod tests;
