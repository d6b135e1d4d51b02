//! Events: changes of virtual machines, tenants, cards and the daemon, with their time and author.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The response to `GET /v1/events`, and each line of its stream.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct EventPage {
    /// The events after the cursor, oldest first.
    pub events: Vec<Event>,
    /// The cursor after these events: `after` of the next request.
    pub next: String,
    /// Number of events between the cursor and `next` that the log no longer has.
    pub lost: u64,
    /// The cursor is from a daemon that has ended. Its later events are gone and not counted in `lost`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub restarted: bool,
    /// A sentence about the lost events.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// An event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Event {
    /// The cursor after this event.
    pub cursor: String,
    /// Number of the event, which is higher than those of all earlier events. Numbers rise by one, also across an
    /// upgrade; a restarted daemon continues at a higher number.
    pub number: u64,
    /// Time of the event in UTC, as RFC 3339 with milliseconds.
    pub at: String,
    /// Its kind.
    pub kind: EventKind,
    /// The object that the event is about.
    pub subject: Subject,
    /// The card of a virtual machine or tenant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub card: Option<String>,
    /// The originator.
    pub author: Author,
    /// A sentence that describes the event.
    pub text: String,
    /// Length of a wait, in ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waited_ms: Option<u64>,
    /// Number of events of this kind and subject that this event stands for; they occurred too fast to be listed.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub suppressed: u64,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// Object that an event is about.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
pub struct Subject {
    /// Its kind.
    pub kind: SubjectKind,
    /// Its name.
    pub name: String,
}

/// Kinds of objects that events are about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SubjectKind {
    /// A virtual machine.
    Vm,
    /// A tenant of a CUDA card.
    Tenant,
    /// A card.
    Card,
    /// The daemon.
    Daemon,
}

impl SubjectKind {
    /// Its name in the API.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Vm => "vm",
            Self::Tenant => "tenant",
            Self::Card => "card",
            Self::Daemon => "daemon",
        }
    }
}

/// Originator of an event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Author {
    /// Its kind.
    pub kind: AuthorKind,
    /// The user of a client, from the credentials of its connection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// The process of a client, from the same credentials; absent if the daemon cannot see it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    /// Name of the client's program, which the client can choose.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
}

/// Kinds of originators.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AuthorKind {
    /// A client of the admin socket: an operator, or a program that places work.
    Client,
    /// The configuration file, with the stored changes.
    Configuration,
    /// The daemon itself.
    Daemon,
}

/// Programs of this project that place work, by the name that the kernel shows (at most 15 bytes).
const KNOWN_PROGRAMS: [(&str, &str); 3] = [
    ("gpu-mediator-dr", "the Kubernetes driver"),
    ("gpu-mediator-ku", "the KubeVirt hook"),
    ("gpu-mediator-sl", "the Slurm plugin"),
];

impl Author {
    /// Describes the author in words; `None` for the daemon.
    #[must_use]
    pub fn in_words(&self) -> Option<String> {
        let Self { kind, uid, pid, program } = self;
        match kind {
            AuthorKind::Daemon => None,
            AuthorKind::Configuration => Some("the configuration file".to_owned()),
            AuthorKind::Client => {
                let known = KNOWN_PROGRAMS.iter().find(|(name, _)| Some(*name) == program.as_deref());
                let program = known.map_or(program.as_deref(), |(_, words)| Some(words));
                let uid = uid.map(|uid| format!("user {uid}"));
                let pid = pid.map(|pid| format!("process {pid}"));
                let parts: Vec<String> = [program.map(str::to_owned), uid, pid].into_iter().flatten().collect();
                Some(if parts.is_empty() { "a client".to_owned() } else { parts.join(", ") })
            }
        }
    }
}

/// Declares the kinds of events: doc comment, variant, name.
macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident = $name:literal,)*) => {
        /// Kinds of events.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
        #[serde(rename_all = "snake_case")]
        pub enum EventKind { $($(#[$doc])* $kind,)* }

        impl EventKind {
            /// All kinds.
            pub const ALL: &[Self] = &[$(Self::$kind,)*];

            /// Its name in the API.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$kind => $name,)* }
            }
        }
    };
}

kinds! {
    /// The daemon has started.
    Started = "started",
    /// The daemon ends.
    Ended = "ended",
    /// An upgrade of the daemon begins.
    UpgradeBegan = "upgrade_began",
    /// The next daemon has taken over.
    Upgraded = "upgraded",
    /// An upgrade failed, and the daemon continues.
    UpgradeFailed = "upgrade_failed",
    /// A virtual machine or tenant was added.
    Added = "added",
    /// A virtual machine or tenant was removed.
    Removed = "removed",
    /// Settings were changed.
    Changed = "changed",
    /// A desired state was applied.
    Applied = "applied",
    /// A VMM or a program has connected.
    Connected = "connected",
    /// A VMM or a program has disconnected.
    Disconnected = "disconnected",
    /// A virtual machine or card is out of service.
    Failed = "failed",
    /// Work or a program was killed.
    Killed = "killed",
    /// A program was given up, but could not be killed.
    KillFailed = "kill_failed",
    /// A program was suspended.
    Suspended = "suspended",
    /// Work ran beyond its limit.
    Overran = "overran",
    /// A quarantine begins.
    Quarantined = "quarantined",
    /// A quarantine ends.
    Released = "released",
    /// Work has waited for some seconds.
    Waits = "waits",
    /// A long wait has ended.
    Waited = "waited",
    /// A move to another card begins.
    MoveBegan = "move_began",
    /// A move to another card has ended.
    Moved = "moved",
    /// A move to another card failed.
    MoveFailed = "move_failed",
    /// A virtual machine was saved.
    Saved = "saved",
    /// A virtual machine could not be saved.
    SaveFailed = "save_failed",
    /// A virtual machine was restored from a saved one.
    Restored = "restored",
    /// A virtual machine could not be restored.
    RestoreFailed = "restore_failed",
    /// An operator has moved memory to host memory or back.
    MemoryMoved = "memory_moved",
    /// A drain of a card begins.
    DrainBegan = "drain_began",
    /// A drain of a card has ended.
    Drained = "drained",
    /// A card accepts virtual machines and tenants again.
    Undrained = "undrained",
    /// The owner of a CUDA card has ended.
    OwnerLost = "owner_lost",
    /// The owner of a CUDA card was started again.
    OwnerStarted = "owner_started",
    /// The MPS server of a share group has ended, or has lost its clients.
    MpsLost = "mps_lost",
    /// The MPS server of a share group was started again.
    MpsStarted = "mps_started",
    /// Events of many subjects occurred too fast to be listed.
    Suppressed = "suppressed",
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn author_is_described_with_the_known_name_of_its_program() {
        let driver = Author {
            kind: AuthorKind::Client,
            uid: Some(0),
            pid: Some(9),
            program: Some("gpu-mediator-dr".to_owned()),
        };
        assert_eq!(driver.in_words().unwrap(), "the Kubernetes driver, user 0, process 9");
        let unknown = Author { uid: None, pid: None, program: None, ..driver };
        assert_eq!(unknown.in_words().unwrap(), "a client");
    }

    #[test]
    fn event_kind_names_equal_their_serialized_form() {
        for kind in EventKind::ALL {
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.name());
        }
        for kind in [SubjectKind::Vm, SubjectKind::Tenant, SubjectKind::Card, SubjectKind::Daemon] {
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.name());
        }
    }
}
