//! `mediatorctl events`: lists the daemon's events, and follows new ones.

use std::fmt::Write as _;
use std::io::Write;
use std::time::Duration;

use api::{Event, EventKind, EventPage, SubjectKind};
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};

use super::client::{AskError, Client, ClientError, segment};
use super::output::{heads, table};
use super::values::named;
use super::{Code, Form, forms};

/// Maximum number of events per request.
const PAGE: usize = 1024;
/// Number of past events shown before the command waits for new ones.
const BEFORE_NEW: usize = 10;
/// Pause between the end of a daemon and the next request.
// TIMEOUT: after an upgrade, the new daemon serves its socket immediately; a restarted daemon takes about a second.
const RETRY_PAUSE: Duration = Duration::from_millis(200);
/// Maximum line length of a stream, in bytes.
const MAX_LINE: usize = 16 << 20;

/// Lists events: kills, quarantines, moves, long waits, and changes with their authors
#[derive(Clone, Debug, Args)]
pub(super) struct Events {
    /// Continues to show events as they occur, across upgrades and restarts of the daemon
    #[arg(short, long)]
    follow: bool,
    /// Starts after this cursor, which is `next` or `cursor` of an earlier response
    #[arg(long, value_name = "CURSOR")]
    after: Option<String>,
    /// Maximum number of past events to show; the default is 10 with --follow but without --after
    #[arg(short = 'n', long, value_name = "COUNT")]
    last: Option<usize>,
    /// Shows only events of this virtual machine
    #[arg(long, help_heading = "Selection", value_name = "NAME")]
    vm: Option<String>,
    /// Shows only events of this tenant
    #[arg(long, help_heading = "Selection", value_name = "NAME", conflicts_with = "vm")]
    tenant: Option<String>,
    /// Shows only events of this card, its virtual machines and its tenants
    #[arg(long, help_heading = "Selection", value_name = "NAME")]
    card: Option<String>,
    /// Shows only events of this kind, such as killed, moved or changed; can be repeated
    #[arg(long, help_heading = "Selection", value_name = "KIND", value_parser = kinds())]
    kind: Vec<EventKind>,
}

/// Returns a parser for event kinds, with shell completion.
fn kinds() -> impl TypedValueParser<Value = EventKind> {
    PossibleValuesParser::new(EventKind::ALL.iter().map(|kind| kind.name())).try_map(|name| named::<EventKind>(&name))
}

impl Events {
    /// Returns true if the command shows new events until it is terminated.
    pub fn follows(&self) -> bool {
        self.follow
    }

    fn selects(&self, event: &Event) -> bool {
        let Event { subject, card, kind, .. } = event;
        let is = |kind, name: &Option<String>| {
            name.as_ref().is_none_or(|name| subject.kind == kind && subject.name == *name)
        };
        let of_card =
            |name: &String| card.as_ref() == Some(name) || (subject.kind == SubjectKind::Card && subject.name == *name);
        is(SubjectKind::Vm, &self.vm)
            && is(SubjectKind::Tenant, &self.tenant)
            && self.card.as_ref().is_none_or(of_card)
            && (self.kind.is_empty() || self.kind.contains(kind))
    }

    fn path(after: Option<&str>, query: &str) -> String {
        let after = after.map(|after| format!("&after={}", segment(after))).unwrap_or_default();
        format!("/v1/events?limit={PAGE}{query}{after}")
    }

    /// Returns the selected events after the cursor in the daemon's log, as one page.
    fn all(&self, client: &Client) -> Result<EventPage, ClientError> {
        let mut all: EventPage = client.get(&Self::path(self.after.as_deref(), ""))?;
        let mut full = all.events.len() == PAGE;
        while full {
            let page: EventPage = client.get(&Self::path(Some(&all.next), ""))?;
            full = page.events.len() == PAGE;
            all.events.extend(page.events);
            all.lost = all.lost.saturating_add(page.lost);
            all.note = all.note.take().or(page.note);
            all.next = page.next;
        }
        all.events.retain(|event| self.selects(event));
        let implied = (self.follow && self.after.is_none()).then_some(BEFORE_NEW);
        if let Some(last) = self.last.or(implied) {
            all.events.drain(..all.events.len().saturating_sub(last));
        }
        if self.after.is_none() {
            // Without a cursor, the command cannot have missed events.
            (all.lost, all.note) = (0, None);
        }
        Ok(all)
    }

    /// Lists the events.
    ///
    /// # Errors
    /// Returns a [`ClientError`] if the request fails.
    pub fn list(&self, client: &Client, form: Form) -> Result<String, ClientError> {
        Ok(form.render(&self.all(client)?, |page| {
            if page.events.is_empty() {
                return format!("{}no events\n", noted(page));
            }
            let mut rows = vec![heads(&["TIME", "KIND", "SUBJECT", "TEXT"])];
            rows.extend(page.events.iter().map(|event| cells(event).to_vec()));
            noted(page) + &table(rows, &[])
        }))
    }

    /// Shows past events, and then new ones as they occur, until the output is closed.
    ///
    /// # Errors
    /// Returns a [`ClientError`] if a request fails. The exit of a daemon that has responded before is not an error.
    pub fn follow(&self, client: &Client, form: Form, out: &mut dyn Write) -> Result<Code, ClientError> {
        let mut shown = Shown { form, out };
        let first = self.all(client)?;
        let mut cursor = first.next.clone();
        if shown.page(&first).is_err() {
            return Ok(Code::Good);
        }
        loop {
            let mut lines = Lines::default();
            let ended = client.follow(&Self::path(Some(&cursor), "&follow=true"), |bytes| {
                lines.split(bytes, |line| {
                    let mut page: EventPage =
                        serde_json::from_slice(line).map_err(|error| Stop::Protocol(error.to_string()))?;
                    cursor = page.next.clone();
                    page.events.retain(|event| self.selects(event));
                    shown.page(&page).map_err(|_| Stop::Closed)
                })
            });
            match ended {
                Err(Stop::Closed) => return Ok(Code::Good),
                Err(Stop::Protocol(what)) => return Err(ClientError::protocol(what)),
                Err(Stop::Ask(error @ (AskError::Refused(_) | AskError::Forbidden { .. }))) => return Err(error.into()),
                // The daemon has exited, or is not available yet.
                Ok(()) | Err(Stop::Ask(_)) => std::thread::sleep(RETRY_PAUSE),
            }
        }
    }
}

/// Reason to stop following events.
enum Stop {
    /// The request failed.
    Ask(AskError),
    /// The output is closed.
    Closed,
    /// A line is not a valid page.
    Protocol(String),
}

impl From<AskError> for Stop {
    fn from(error: AskError) -> Self {
        Self::Ask(error)
    }
}

/// Splits the bytes of a stream into lines.
#[derive(Default)]
struct Lines(Vec<u8>);

impl Lines {
    fn split(&mut self, bytes: &[u8], mut take: impl FnMut(&[u8]) -> Result<(), Stop>) -> Result<(), Stop> {
        self.0.extend_from_slice(bytes);
        while let Some(end) = self.0.iter().position(|byte| *byte == b'\n') {
            let rest = self.0.split_off(end + 1);
            let line = std::mem::replace(&mut self.0, rest);
            take(line.trim_ascii())?;
        }
        match self.0.len() > MAX_LINE {
            true => Err(Stop::Protocol(format!("a line of the stream exceeds {MAX_LINE} bytes"))),
            false => Ok(()),
        }
    }
}

/// Output of a follower.
struct Shown<'a> {
    form: Form,
    out: &'a mut dyn Write,
}

impl Shown<'_> {
    /// Writes a page as aligned lines, a line of JSON, a YAML document, or CSV with a header. Skips pages that have
    /// neither events nor a note.
    fn page(&mut self, page: &EventPage) -> std::io::Result<()> {
        let text = match self.form {
            Form::Table | Form::Wide => page.events.iter().fold(noted(page), |mut text, event| {
                let [time, kind, subject, words] = cells(event);
                let _ = writeln!(text, "{time:<24}  {kind:<14}  {subject:<20}  {words}");
                text
            }),
            _ if page.events.is_empty() && page.note.is_none() => String::new(),
            Form::Json => serde_json::to_string(page).unwrap_or_default() + "\n",
            Form::Yaml => format!("---\n{}", forms::yaml(page)),
            Form::Csv => forms::csv(&page.events),
        };
        self.out.write_all(self.form.shown(&text).as_bytes())?;
        self.out.flush()
    }
}

/// Returns a page's note as a line, or an empty text.
fn noted(page: &EventPage) -> String {
    page.note.as_ref().map(|note| format!("-- {note}\n")).unwrap_or_default()
}

/// Returns the time, kind, subject and text of an event.
fn cells(event: &Event) -> [String; 4] {
    let Event { at, kind, subject, text, author, .. } = event;
    let subject = match subject.kind {
        SubjectKind::Daemon => subject.name.clone(),
        kind => format!("{} {}", kind.name(), subject.name),
    };
    let line = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let by = author.in_words().map(|author| format!(" (by {author})")).unwrap_or_default();
    [at.clone(), kind.name().to_owned(), line(&subject), line(&format!("{text}{by}"))]
}
