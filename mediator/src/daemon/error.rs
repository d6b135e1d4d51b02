//! Why the daemon cannot do what an operator asks.

use vmm_glue::socket::BindError;

use crate::admin::api::{self, ErrorCode};
use crate::config::check::{Refusal, RefusalKind};

/// A request that failed: for people the text, for programs [`DaemonError::code`].
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// No virtual machine has the name.
    #[error("there is no VM `{0}`")]
    NoVm(String),
    /// No card has the name.
    #[error("there is no card `{0}`")]
    NoCard(String),
    /// The virtual machine is being made or removed.
    #[error("VM `{0}` is being {1}")]
    Busy(String, &'static str),
    /// The virtual machine cannot be as it is described.
    #[error("{}", list(.0))]
    Refused(Vec<Refusal>),
    /// Too many virtual machines.
    #[error("there are {0} VMs already, as many as one daemon serves")]
    TooMany(usize),
    /// Its socket could not be made.
    #[error("{0}")]
    Socket(#[from] BindError),
    /// A user or a group does not exist.
    #[error("there is no {what} `{name}` on this host")]
    NoAccount {
        /// `user` or `group`.
        what: &'static str,
        /// Its name.
        name: String,
    },
    /// The card refuses for want of something.
    #[error("VM `{vm}` cannot be added: {what}")]
    Quota {
        /// Name of the virtual machine.
        vm: String,
        /// What is lacking.
        what: String,
    },
    /// A virtual machine has its card by passthrough, so nobody shares the card's time.
    #[error("VM `{0}` has its card by passthrough, which has no scheduler then")]
    NoScheduler(String),
    /// A card has no scheduler.
    #[error("card `{0}` has no scheduler")]
    Unscheduled(String),
    /// A card's scheduler cannot be recorded now.
    #[error("no record of card `{0}` can be made: no VM uses it, or one is being made already")]
    NoRecord(String),
    /// A setting cannot be as it is asked for: its key, and what is wrong.
    #[error("{0}")]
    Setting(String),
    /// The card or the host failed.
    #[error("{0}")]
    Failed(String),
    /// The daemon is ending.
    #[error("the daemon is shutting down")]
    ShuttingDown,
}

fn list(refusals: &[Refusal]) -> String {
    let lines: Vec<_> = refusals.iter().map(|refusal| format!("{}: {}", refusal.field, refusal.what)).collect();
    lines.join("; ")
}

impl DaemonError {
    /// What kind of error it is.
    #[must_use]
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::NoVm(_) | Self::NoCard(_) => ErrorCode::NotFound,
            Self::Busy(..) | Self::NoScheduler(_) | Self::Unscheduled(_) | Self::NoRecord(_) => ErrorCode::Conflict,
            Self::TooMany(_) | Self::Quota { .. } => ErrorCode::Quota,
            Self::NoAccount { .. } | Self::Setting(_) => ErrorCode::Invalid,
            Self::Failed(_) | Self::ShuttingDown => ErrorCode::Failed,
            Self::Socket(BindError::InUse { .. } | BindError::NotASocket { .. }) => ErrorCode::Conflict,
            Self::Socket(BindError::TooLong { .. } | BindError::NoDirectory { .. }) => ErrorCode::Invalid,
            Self::Socket(BindError::NotPermitted { .. } | BindError::System { .. }) => ErrorCode::Failed,
            Self::Refused(refusals) => {
                let any = |kind| refusals.iter().any(|refusal| refusal.kind == kind);
                match () {
                    () if any(RefusalKind::Invalid) => ErrorCode::Invalid,
                    () if any(RefusalKind::UnknownCard) => ErrorCode::NotFound,
                    () if any(RefusalKind::Conflict) => ErrorCode::Conflict,
                    () => ErrorCode::Quota,
                }
            }
        }
    }

    /// What the operator can do about it.
    #[must_use]
    pub fn what_to_do(&self) -> &'static str {
        match self {
            Self::NoVm(_) => "see `mediatorctl vm list` for the names",
            Self::NoCard(_) => "see `mediatorctl card show` for the names",
            Self::Busy(..) => "wait until that is done, then try again",
            Self::TooMany(_) => "remove a VM first",
            Self::NoAccount { .. } => "name an existing one, or its number",
            Self::Quota { .. } => "remove a VM, or ask for less",
            Self::NoScheduler(_) => "to have it share the card's time, remove it and add it without passthrough",
            Self::Unscheduled(_) => "see `mediatorctl card show` for the cards",
            Self::NoRecord(_) => "try again when the other record is done, or a VM has been added",
            Self::Setting(_) => "correct the value; keys that are left out stay as they are",
            Self::Failed(_) => "see the daemon's log",
            Self::ShuttingDown => "start it again",
            Self::Socket(_) => match self.code() {
                ErrorCode::Conflict => "end the process that serves it, or name another path with --socket-path",
                ErrorCode::Invalid => "make the folder first, or name another path with --socket-path",
                _ => "check the folder's permissions and the daemon's user",
            },
            Self::Refused(_) => match self.code() {
                ErrorCode::NotFound => "see `mediatorctl card show` for the cards",
                ErrorCode::Conflict => "choose another value, or remove what is in the way",
                ErrorCode::Quota => "remove a VM, or ask for less",
                _ => "correct the value",
            },
        }
    }

    /// The body of the answer.
    #[must_use]
    pub fn to_api(&self) -> api::Error {
        api::Error { code: self.code(), error: self.to_string(), what_to_do: self.what_to_do().to_owned() }
    }
}
