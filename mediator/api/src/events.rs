//! Events: changes to virtual machines, tenants, cards and the daemon, with their time and author.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Response to `GET /v1/events`, and each line of its stream.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct EventPage {
    /// Events after the cursor, oldest first.
    pub events: Vec<Event>,
    /// Cursor after these events, for `after` in the next request.
    pub next: String,
    /// Number of events between the cursor and `next` that are no longer in the log.
    pub lost: u64,
    /// True if the cursor is from a daemon that has exited. That daemon's later events are lost, and are not counted in
    /// `lost`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub restarted: bool,
    /// Human-readable note about lost events.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// Event of the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Event {
    /// Cursor after this event.
    pub cursor: String,
    /// Number of the event. Numbers increase by one, also across upgrades; after a restart, the daemon continues with a
    /// higher number.
    pub number: u64,
    /// Time of the event in UTC, in RFC 3339 format with milliseconds.
    pub at: String,
    /// Kind of the event.
    pub kind: EventKind,
    /// Object that the event is about.
    pub subject: Subject,
    /// Card of the virtual machine or tenant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub card: Option<String>,
    /// Originator of the event.
    pub author: Author,
    /// Human-readable description of the event.
    pub text: String,
    /// Duration of the wait, in ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waited_ms: Option<u64>,
    /// Number of events of this kind and subject that this event summarizes, because they occurred too fast to be
    /// listed individually.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub suppressed: u64,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// Object that an event is about.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
pub struct Subject {
    /// Kind of the object.
    pub kind: SubjectKind,
    /// Name of the object.
    pub name: String,
}

/// Kind of object that an event is about.
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
    /// Returns the name in the API.
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
    /// Kind of the originator.
    pub kind: AuthorKind,
    /// User ID of the client, from the credentials of its connection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Process ID of the client, from the same credentials; absent if the daemon cannot see the process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    /// Name of the client's program. The client can choose it freely.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
}

/// Kind of originator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AuthorKind {
    /// A client of the admin socket: an operator, or an orchestration program.
    Client,
    /// The configuration file, including stored changes.
    Configuration,
    /// The daemon itself.
    Daemon,
}

/// Orchestration programs of this project, by their process name in the kernel (at most 15 bytes).
const KNOWN_PROGRAMS: [(&str, &str); 3] = [
    ("gpu-mediator-dr", "the Kubernetes driver"),
    ("gpu-mediator-ku", "the KubeVirt hook"),
    ("gpu-mediator-sl", "the Slurm plugin"),
];

impl Author {
    /// Returns a description of the originator; `None` for the daemon.
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

/// Declares the kinds of events, each with a doc comment, a variant and a name.
macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident = $name:literal,)*) => {
        /// Kind of an event.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
        #[serde(rename_all = "snake_case")]
        pub enum EventKind { $($(#[$doc])* $kind,)* }

        impl EventKind {
            /// All kinds of events.
            pub const ALL: &[Self] = &[$(Self::$kind,)*];

            /// Returns the name in the API.
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
    /// The daemon is exiting.
    Ended = "ended",
    /// An upgrade of the daemon began.
    UpgradeBegan = "upgrade_began",
    /// The new daemon has taken over.
    Upgraded = "upgraded",
    /// An upgrade failed, and the old daemon continues.
    UpgradeFailed = "upgrade_failed",
    /// A virtual machine or tenant was added.
    Added = "added",
    /// A virtual machine or tenant was removed.
    Removed = "removed",
    /// Settings were changed.
    Changed = "changed",
    /// A desired state was applied.
    Applied = "applied",
    /// A VMM or program has connected.
    Connected = "connected",
    /// A VMM or program has disconnected.
    Disconnected = "disconnected",
    /// A virtual machine or card is out of service.
    Failed = "failed",
    /// A submission or a program was killed.
    Killed = "killed",
    /// An unresponsive program could not be killed.
    KillFailed = "kill_failed",
    /// A program was suspended.
    Suspended = "suspended",
    /// Work exceeded its time limit.
    Overran = "overran",
    /// A quarantine began.
    Quarantined = "quarantined",
    /// A quarantine ended.
    Released = "released",
    /// Work has been waiting for several seconds.
    Waits = "waits",
    /// A long wait has ended.
    Waited = "waited",
    /// A move to another card began.
    MoveBegan = "move_began",
    /// A move to another card completed.
    Moved = "moved",
    /// A move to another card failed.
    MoveFailed = "move_failed",
    /// A virtual machine was saved.
    Saved = "saved",
    /// A virtual machine could not be saved.
    SaveFailed = "save_failed",
    /// A virtual machine was restored from a saved state.
    Restored = "restored",
    /// A virtual machine could not be restored.
    RestoreFailed = "restore_failed",
    /// An operator moved memory to host memory or back.
    MemoryMoved = "memory_moved",
    /// The drain of a card began.
    DrainBegan = "drain_began",
    /// The drain of a card completed.
    Drained = "drained",
    /// A card accepts virtual machines and tenants again.
    Undrained = "undrained",
    /// The owner of a CUDA card has exited.
    OwnerLost = "owner_lost",
    /// The owner of a CUDA card was restarted.
    OwnerStarted = "owner_started",
    /// The MPS server of a share group has exited, or has lost its clients.
    MpsLost = "mps_lost",
    /// The MPS server of a share group was restarted.
    MpsStarted = "mps_started",
    /// Events about many objects occurred too fast to be listed individually.
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
