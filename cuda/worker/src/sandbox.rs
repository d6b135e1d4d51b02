//! The worker's restrictions: a guest may run any code in its worker.
//!
//! Two steps, both before the worker reads anything of the guest. [`Sandbox::enter`] comes before the driver is loaded:
//! user, capabilities, limits, files. [`Sandbox::close`] comes after the driver has started, because its start needs
//! more: the filter of system calls, for all threads.
//!
//! - `files`: the files that a worker may open, through Landlock.
//! - `filter`: the system calls that it may make.
//! - `addresses`: the only addresses that it may connect to, in memory that nothing can change.
//! - `violation`: reports a forbidden call, and ends the worker.

mod addresses;
mod files;
mod filter;
mod violation;

use std::os::fd::BorrowedFd;
use std::path::PathBuf;

use rustix::io::Errno;
use rustix::process::{Gid, Resource, Rlimit, Uid, setrlimit};
use rustix::thread::{CapabilitySet, CapabilitySets};

use addresses::Addresses;

/// Descriptors that a worker may open: the driver's device files, chunks and pipes.
const MAX_DESCRIPTORS: u64 = 16_384;
/// Bytes of memory that a worker may lock. The driver's pinned memory does not count.
const MAX_LOCKED_BYTES: u64 = 1 << 20;
/// Bytes of private memory that a worker may have: far more than the driver and its compiler need.
const MAX_PRIVATE_BYTES: u64 = 8 << 30;
/// Threads of a user of workers, and of the daemon's user with the daemon itself.
const MAX_OWN_THREADS: u64 = 4096;
const MAX_SHARED_THREADS: u64 = 32_768;
/// Priority of workers for the kernel's choice of a process to kill when the host is out of memory: before all others.
const OOM_SCORE: &str = "1000";
/// Highest number of a capability that a kernel may have.
const MAX_CAPABILITY: u32 = 63;

/// Restrictions of a worker, apart from those that all have.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// User and group of the worker's own, if the worker may change them.
    pub user: Option<(u32, u32)>,
    /// Further files and folders that it may read.
    pub readable: Vec<PathBuf>,
    /// Further files and folders that it may change.
    pub writable: Vec<PathBuf>,
    /// Sockets that it may connect to, at most two: those of the card's owner and of the next daemon.
    pub sockets: Vec<PathBuf>,
}

/// A restriction that the kernel refused.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// A step failed.
    #[error("cannot restrict the worker: {0} failed: {1}")]
    Step(&'static str, Errno),
    /// The kernel has no Landlock, and the worker has no user of its own.
    #[error(
        "cannot restrict the worker's files: this kernel has no Landlock (Linux 5.13, `lsm=landlock`). Use such a \
         kernel, or give workers users of their own (`worker_users` of the card)"
    )]
    NoLandlock,
    /// The kernel refused the rules for files.
    #[error("cannot restrict the worker's files: {0}")]
    Files(#[from] landlock::RulesetError),
    /// The filter of system calls cannot be made or installed.
    #[error("cannot filter the worker's system calls: {0}")]
    Filter(String),
    /// The addresses of sockets cannot be kept.
    #[error("cannot keep the addresses of the worker's sockets: {0}")]
    Address(std::io::Error),
}

/// A process with the first restrictions.
#[derive(Debug)]
pub struct Sandbox {
    addresses: Addresses,
    /// Keeps the kernel's entries of the files, to which the rules are bound.
    _files: Option<files::Files>,
}

impl Sandbox {
    /// Restricts this process, which has one thread: its user, capabilities, limits and files.
    ///
    /// # Errors
    /// If the kernel refuses one of them.
    pub fn enter(options: &Options) -> Result<Self, SandboxError> {
        let step = |name| move |error| SandboxError::Step(name, error);
        rustix::thread::set_no_new_privs(true).map_err(step("no_new_privs"))?;
        remove_bounds();
        if let Some((user, group)) = options.user {
            change_user(Uid::from_raw(user), Gid::from_raw(group))?;
        }
        drop_capabilities().map_err(step("the removal of capabilities"))?;
        limit(Resource::Core, 0).map_err(step("the limit of core dumps"))?;
        limit(Resource::Nofile, MAX_DESCRIPTORS).map_err(step("the limit of descriptors"))?;
        limit(Resource::Memlock, MAX_LOCKED_BYTES).map_err(step("the limit of locked memory"))?;
        limit(Resource::Data, MAX_PRIVATE_BYTES).map_err(step("the limit of memory"))?;
        let processes = if options.user.is_some() { MAX_OWN_THREADS } else { MAX_SHARED_THREADS };
        limit(Resource::Nproc, processes).map_err(step("the limit of threads"))?;
        limit(Resource::Msgqueue, 0).map_err(step("the limit of message queues"))?;
        limit(Resource::Rtprio, 0).map_err(step("the limit of priorities"))?;
        // Without the file, the kernel chooses as for other processes.
        let _ = std::fs::write("/proc/self/oom_score_adj", OOM_SCORE);
        let addresses = Addresses::keep(&options.sockets).map_err(SandboxError::Address)?;
        let files = files::restrict(options)?;
        if files.is_none() && options.user.is_none() {
            return Err(SandboxError::NoLandlock);
        }
        Ok(Self { addresses, _files: files })
    }

    /// Forbids all system calls that a worker does not need, in all threads. A worker that makes one reports it at
    /// `link`, and ends.
    ///
    /// # Errors
    /// If the kernel refuses the filter.
    pub fn close(&self, link: BorrowedFd<'_>) -> Result<(), SandboxError> {
        violation::prepare(link, self.addresses).map_err(|error| SandboxError::Step("the signal handler", error))?;
        filter::install(self.addresses).map_err(SandboxError::Filter)
    }
}

/// Names the connection at which forbidden calls are reported from now on.
pub(crate) fn report_at(link: BorrowedFd<'_>) {
    violation::set_link(link);
}

/// Changes to a user without further groups.
fn change_user(user: Uid, group: Gid) -> Result<(), SandboxError> {
    let step = |name| move |error| SandboxError::Step(name, error);
    rustix::thread::set_thread_groups(&[]).map_err(step("the removal of groups"))?;
    rustix::thread::set_thread_res_gid(group, group, group).map_err(step("the change of the group"))?;
    rustix::thread::set_thread_res_uid(user, user, user).map_err(step("the change of the user"))?;
    // The change of the user has taken the process's own files in /proc away from it, which the driver reads.
    let dumpable = rustix::process::DumpableBehavior::Dumpable;
    rustix::process::set_dumpable_behavior(dumpable).map_err(step("the access to own files"))
}

/// Removes all capabilities from those that programs could gain. Needs a right that only some processes have;
/// no_new_privs protects the others.
fn remove_bounds() {
    for number in 0..=MAX_CAPABILITY {
        let _ = rustix::thread::remove_capability_from_bounding_set(CapabilitySet::from_bits_retain(1 << number));
    }
}

fn drop_capabilities() -> Result<(), Errno> {
    let sets = rustix::thread::capabilities(None)?;
    if [sets.effective, sets.permitted, sets.inheritable].iter().all(|set| set.is_empty()) {
        // A service's filter may forbid a call that would change nothing.
        return Ok(());
    }
    rustix::thread::clear_ambient_capability_set()?;
    let none = CapabilitySet::empty();
    rustix::thread::set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })
}

fn limit(resource: Resource, most: u64) -> Result<(), Errno> {
    let hard = rustix::process::getrlimit(resource).maximum.unwrap_or(most).min(most);
    setrlimit(resource, Rlimit { current: Some(hard), maximum: Some(hard) })
}
