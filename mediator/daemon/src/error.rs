//! Errors of requests to the daemon.

use vmm_glue::socket::BindError;

use api::ErrorCode;
use config::check::{Refusal, RefusalKind};
use listening::account::NoAccount;
use listening::folders::FolderError;

/// Error of a request to the daemon. The message is for users, and [`DaemonError::code`] is for programs.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// No virtual machine has this name.
    #[error("there is no VM `{0}`")]
    NoVm(String),
    /// No tenant has this name.
    #[error("there is no tenant `{0}`")]
    NoTenant(String),
    /// No profile has this name.
    #[error("there is no profile `{0}`")]
    NoProfile(String),
    /// No card has this name.
    #[error("there is no card `{0}`")]
    NoCard(String),
    /// The virtual machine is being created or removed.
    #[error("VM `{0}` is being {1}")]
    Busy(String, &'static str),
    /// The virtual machine's settings are rejected.
    #[error("VM `{vm}`: {}", list(.refusals))]
    Refused {
        /// Name of the virtual machine.
        vm: String,
        /// All reasons for the rejection.
        refusals: Vec<Refusal>,
    },
    /// The tenant's settings are rejected.
    #[error("tenant `{tenant}`: {}", list(.refusals))]
    TenantRefused {
        /// Name of the tenant.
        tenant: String,
        /// All reasons for the rejection.
        refusals: Vec<Refusal>,
    },
    /// The owner of a CUDA card does not respond. The message names the card, and the timeout or the reason.
    #[error("{0}")]
    Owner(String),
    /// Too many changes to a CUDA card are pending.
    #[error("too many changes of card `{0}` are already pending")]
    Crowded(String),
    /// A tenant was removed, but some of its processes have not exited.
    #[error("tenant `{tenant}` was removed, but its processes {} have not exited: their card memory is not free",
        .pids.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))]
    Lingering {
        /// Name of the tenant.
        tenant: String,
        /// IDs of the remaining processes.
        pids: Vec<u32>,
    },
    /// A tenant with this name already exists.
    #[error("tenant `{0}` already exists")]
    TenantThere(String),
    /// Another process holds a lease on the tenant's limits.
    #[error("process {1} already holds a lease on limits of tenant `{0}`")]
    Leased(String, i32),
    /// The daemon cannot watch the client's process.
    #[error("the exit of the client's process cannot be detected: {0}")]
    Unwatched(String),
    /// The limit on tenants is reached.
    #[error("{0} tenants already exist, the maximum for one daemon")]
    TooManyTenants(usize),
    /// The limit on virtual machines is reached.
    #[error("{0} VMs already exist, the maximum for one daemon")]
    TooMany(usize),
    /// The socket could not be created.
    #[error("{0}")]
    Socket(#[from] BindError),
    /// The socket's folder could not be created.
    #[error("{0}")]
    Folder(#[from] FolderError),
    /// A user or group does not exist.
    #[error(transparent)]
    NoAccount(#[from] NoAccount),
    /// The card does not have enough of a resource.
    #[error("{of}: {what}")]
    Quota {
        /// Kind and name of the rejected object.
        of: String,
        /// The exceeded limit, with its key and value.
        what: String,
        /// Remedy for the operator.
        what_to_do: String,
    },
    /// A virtual machine is not a Xen domain.
    #[error("VM `{0}` is not a Xen domain: it has no `xen_domain`")]
    NoDomain(String),
    /// A virtual machine is a Xen domain, and therefore has no socket for another VMM.
    #[error("VM `{0}` is the Xen domain `{1}`, and has no socket for another VMM")]
    IsDomain(String, String),
    /// A virtual machine uses its card in passthrough, or is a tenant of a CUDA card.
    #[error("VM `{0}` uses its card in passthrough, or is a tenant of a CUDA card: its share of the card is fixed")]
    NoScheduler(String),
    /// A card has no scheduler.
    #[error("card `{0}` has no scheduler")]
    Unscheduled(String),
    /// A card's scheduler currently cannot be recorded.
    #[error("card `{0}` cannot be recorded: no VM uses it, or it is already being recorded")]
    NoRecord(String),
    /// A VM's accesses are already being counted.
    #[error("accesses of VM `{0}` are already being counted")]
    Counting(String),
    /// A setting has an invalid value.
    #[error("{of}: {what}")]
    Setting {
        /// Kind and name of the object.
        of: String,
        /// The key, and the reason why its value is invalid.
        what: String,
    },
    /// A query parameter has an invalid value.
    #[error("{0}")]
    Query(String),
    /// The next daemon did not take over from this daemon.
    #[error("the daemon was not upgraded, and continues: {0}")]
    NotHandedOver(String),
    /// A virtual machine cannot move to a card.
    #[error("VM `{vm}` cannot move to card `{to}`: {why}")]
    CannotMove {
        /// Name of the virtual machine.
        vm: String,
        /// Name of the target card.
        to: String,
        /// Reason why the move is impossible.
        why: String,
    },
    /// A tenant cannot move to another card.
    #[error("tenant `{tenant}` cannot move to {to}: {why}")]
    TenantStays {
        /// Name of the tenant.
        tenant: String,
        /// Description of the target card.
        to: String,
        /// Reason why the move is impossible.
        why: String,
    },
    /// A virtual machine could not be saved.
    #[error("VM `{vm}` was not saved: {why}")]
    NotSaved {
        /// Name of the virtual machine.
        vm: String,
        /// Reason for the failure.
        why: String,
    },
    /// A virtual machine could not be restored.
    #[error("VM `{vm}` was not restored: {why}")]
    NotRestored {
        /// Name of the virtual machine.
        vm: String,
        /// Reason for the failure.
        why: String,
    },
    /// The workers of a virtual machine could not be restarted.
    #[error("workers of VM `{vm}` were not restarted: {why}")]
    NotRestarted {
        /// Name of the virtual machine.
        vm: String,
        /// Reason for the failure.
        why: String,
    },
    /// A virtual machine cannot move to any other card.
    #[error("VM `{vm}` cannot move to another card: {why}")]
    Immovable {
        /// Name of the virtual machine.
        vm: String,
        /// Reason why the move is impossible.
        why: String,
    },
    /// Another operator has changed settings in the meantime.
    #[error("revision conflict: expected {expected}, current {now}")]
    Changed {
        /// Revision that the request expected.
        expected: String,
        /// Current revision.
        now: String,
    },
    /// Parts of a desired state were rejected.
    #[error("{}", lines(.0))]
    Desired(Vec<super::desired::Obstacle>),
    /// A step failed after other steps were completed.
    #[error("{error}; completed changes: {done}")]
    Partly {
        /// Error of the failed step.
        #[source]
        error: Box<DaemonError>,
        /// Description of the completed steps.
        done: String,
    },
    /// A change was made but not saved, so it will be lost on restart.
    #[error("applied but not saved; lost on restart: {0}")]
    NotKept(String),
    /// The card or the host failed.
    #[error("{0}")]
    Failed(String),
    /// The daemon is shutting down.
    #[error("the daemon is shutting down")]
    ShuttingDown,
}

fn lines(obstacles: &[super::desired::Obstacle]) -> String {
    let lines: Vec<_> = obstacles.iter().map(ToString::to_string).collect();
    lines.join("\n")
}

fn list(refusals: &[Refusal]) -> String {
    let lines: Vec<_> = refusals.iter().map(|refusal| format!("{}: {}", refusal.field, refusal.what)).collect();
    lines.join("; ")
}

impl DaemonError {
    /// Returns the kind of the error.
    #[must_use]
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::NoVm(_) | Self::NoTenant(_) | Self::NoProfile(_) | Self::NoCard(_) => ErrorCode::NotFound,
            Self::Crowded(_) | Self::TenantThere(_) | Self::Leased(..) => ErrorCode::Conflict,
            Self::Busy(..) | Self::NoScheduler(_) | Self::Unscheduled(_) | Self::NoRecord(_) | Self::Counting(_) => {
                ErrorCode::Conflict
            }
            Self::TooMany(_) | Self::TooManyTenants(_) | Self::Quota { .. } => ErrorCode::Quota,
            Self::NoAccount { .. } | Self::Folder(_) | Self::Setting { .. } | Self::Query(_) => ErrorCode::Invalid,
            Self::NoDomain(_) | Self::IsDomain(..) | Self::Unwatched(_) => ErrorCode::Invalid,
            Self::Changed { .. } | Self::NotHandedOver(_) => ErrorCode::Conflict,
            Self::CannotMove { .. } | Self::Immovable { .. } | Self::TenantStays { .. } => ErrorCode::Conflict,
            Self::NotSaved { .. } | Self::NotRestored { .. } | Self::NotRestarted { .. } => ErrorCode::Conflict,
            Self::Desired(obstacles) => {
                // Report the error that the operator should resolve first.
                let order = [ErrorCode::Invalid, ErrorCode::NotFound, ErrorCode::Conflict, ErrorCode::Quota];
                let any = |code: &ErrorCode| obstacles.iter().any(|obstacle| obstacle.code == *code);
                order.into_iter().find(any).unwrap_or(ErrorCode::Failed)
            }
            Self::Partly { error, .. } => error.code(),
            Self::Owner(_) | Self::Lingering { .. } => ErrorCode::Failed,
            Self::Failed(_) | Self::NotKept(_) | Self::ShuttingDown => ErrorCode::Failed,
            Self::Socket(BindError::InUse { .. } | BindError::NotASocket { .. }) => ErrorCode::Conflict,
            Self::Socket(BindError::TooLong { .. } | BindError::NoDirectory { .. }) => ErrorCode::Invalid,
            Self::Socket(BindError::NotPermitted { .. } | BindError::System { .. }) => ErrorCode::Failed,
            Self::Refused { refusals, .. } | Self::TenantRefused { refusals, .. } => {
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

    /// Returns the remedy for the operator.
    #[must_use]
    pub fn what_to_do(&self) -> &str {
        match self {
            Self::NoTenant(_) => "see `mediatorctl tenant list` for the names",
            Self::NoProfile(_) => "see `mediatorctl profile list` for the names",
            Self::Owner(_) => {
                "try again: an owner that exits, or does not respond for 10 s, is restarted, and its programs continue; \
                 if that does not help, see the daemon's log"
            }
            Self::Crowded(_) => "wait until pending changes have completed, then try again",
            Self::Lingering { .. } => {
                "terminate these processes; the daemon needs CAP_KILL to kill processes of other users"
            }
            Self::Leased(..) => {
                "wait until the process has exited, or omit --memory and --weight; `mediatorctl tenant set` sets permanent limits"
            }
            Self::Unwatched(_) => {
                "run the command on the daemon's host, or set permanent limits with `mediatorctl tenant set`"
            }
            Self::NoVm(_) => "see `mediatorctl vm list` for the names",
            Self::NoCard(_) => "see `mediatorctl card show` for the names",
            Self::Busy(..) => "wait until that has completed, then try again",
            Self::TooMany(_) => "remove a VM first",
            Self::TooManyTenants(_) => "remove a tenant first",
            Self::TenantThere(_) => "choose another name, or change the existing tenant with `mediatorctl tenant set`",
            Self::NoAccount { .. } => "specify an existing name or ID",
            Self::Quota { what_to_do, .. } => what_to_do,
            Self::NoDomain(_) => "add the VM with `xen_domain` to use its vGPU in a Xen domain, or specify another VMM",
            Self::IsDomain(..) => "use --vmm xen",
            Self::NoScheduler(_) => "remove the VM and add it without passthrough, so that it shares the card's time",
            Self::Unscheduled(_) => "see `mediatorctl card show` for the cards",
            Self::Counting(_) => "try again when the count has completed",
            Self::NoRecord(_) => "try again after the other recording has ended, or after adding a VM",
            Self::Folder(_) => "specify another path, or remove the file at the directory's path",
            Self::Setting { .. } => "correct the value; omitted keys keep their values",
            Self::Query(_) => "correct the value",
            Self::CannotMove { .. } => "remove the obstacle, or specify another card; the VM continues on its card",
            Self::TenantStays { .. } => {
                "remove the obstacle, or specify another card; the tenant and its programs continue"
            }
            Self::NotSaved { .. } => {
                "remove the obstacle, and try again; the VM continues, and the written data is not a saved VM"
            }
            Self::NotRestored { .. } => "remove the obstacle, or use another file; the VM continues unchanged",
            Self::NotRestarted { .. } => "see the programs with `mediatorctl vm show NAME`; they continue",
            Self::Immovable { .. } => "free memory on another card, or remove the VM; it continues on its card",
            Self::Changed { .. } => "read the state again (`mediatorctl export`), and repeat what is still correct",
            Self::Desired(_) => match self.code() {
                ErrorCode::Conflict => "nothing was changed; see above for the remedy of each conflict",
                ErrorCode::NotFound => "nothing was changed; see `mediatorctl card show` for the cards",
                ErrorCode::Quota => {
                    "nothing was changed; request less, lower the guarantees of other VMs, or remove one"
                }
                _ => "nothing was changed; correct the values",
            },
            Self::Partly { .. } => "resolve the failure, and apply the file again: completed changes are kept",
            Self::NotHandedOver(_) => {
                "correct the named problem, and try again; `mediatord --check` checks only the configuration"
            }
            Self::NotKept(_) => {
                "free disk space, or correct the permissions of `state_dir`; the next change saves the whole state"
            }
            Self::Failed(_) => "see the daemon's log",
            Self::ShuttingDown => "start the daemon again",
            Self::Socket(_) => match self.code() {
                ErrorCode::Conflict => {
                    "terminate the process that uses the socket, or specify another path with --socket-path"
                }
                ErrorCode::Invalid => "create the directory first, or specify another path with --socket-path",
                _ => "check the permissions of the directory, and the daemon's user",
            },
            Self::Refused { .. } | Self::TenantRefused { .. } => match self.code() {
                ErrorCode::NotFound => "see `mediatorctl card show` for the cards",
                ErrorCode::Conflict => "choose another value, or remove the obstacle",
                ErrorCode::Quota => "request less, lower the guarantees of other VMs, or remove one",
                _ => "correct the value",
            },
        }
    }

    /// Returns the response body.
    #[must_use]
    pub fn to_api(&self) -> api::Error {
        api::Error { code: self.code(), error: self.to_string(), what_to_do: self.what_to_do().to_owned() }
    }
}
