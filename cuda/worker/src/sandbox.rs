//! The worker's sandbox. It is needed because a guest may be able to run arbitrary code in its worker.
//!
//! The sandbox has two steps, both before the worker reads any guest data. [`Sandbox::enter`] restricts the user,
//! capabilities, limits and files before the driver is loaded. [`Sandbox::close`] installs the system call filter for
//! all threads after the driver has been initialized, because the initialization needs more system calls.
//!
//! - `files`: the files that a worker may open, restricted through Landlock.
//! - `filter`: the system calls that a worker may make.
//! - `addresses`: the only addresses that a worker may connect to, in immutable memory.
//! - `violation`: reports a forbidden call and terminates the worker.

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

/// Maximum number of open descriptors of a worker: the driver's device files, chunks and pipes.
const MAX_DESCRIPTORS: u64 = 16_384;
/// Maximum size of the memory that a worker may lock, in bytes, excluding the driver's pinned memory.
const MAX_LOCKED_BYTES: u64 = 1 << 20;
/// Maximum size of a worker's private memory, in bytes. This is far more than the driver and its compiler need.
const MAX_PRIVATE_BYTES: u64 = 8 << 30;
/// Maximum number of threads of a user that runs only workers.
const MAX_OWN_THREADS: u64 = 4096;
/// Maximum number of threads of the daemon's user, including the daemon's own threads.
const MAX_SHARED_THREADS: u64 = 32_768;
/// OOM score adjustment of workers. If the host runs out of memory, the kernel kills workers before other processes.
const OOM_SCORE: &str = "1000";
/// Highest capability number that a kernel may define.
const MAX_CAPABILITY: u32 = 63;

/// A worker's individual restrictions.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// User ID and group ID that the worker switches to, if permitted.
    pub user: Option<(u32, u32)>,
    /// Additional files and folders that the worker may read.
    pub readable: Vec<PathBuf>,
    /// Additional files and folders that the worker may modify.
    pub writable: Vec<PathBuf>,
    /// Sockets that the worker may connect to, at most two: those of the card's owner and of the next daemon.
    pub sockets: Vec<PathBuf>,
}

/// Reason why the sandbox cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// A step failed. Contains the step and its error.
    #[error("cannot restrict the worker: {0} failed: {1}")]
    Step(&'static str, Errno),
    /// The kernel lacks Landlock, and the worker has no separate user.
    #[error(
        "cannot restrict the worker's files: this kernel has no Landlock (Linux 5.13, `lsm=landlock`). Use a kernel \
         with Landlock, or give workers separate users (`worker_users` of the card)"
    )]
    NoLandlock,
    /// The kernel rejected the Landlock rules.
    #[error("cannot restrict the worker's files: {0}")]
    Files(#[from] landlock::RulesetError),
    /// The system call filter cannot be created or installed.
    #[error("cannot filter the worker's system calls: {0}")]
    Filter(String),
    /// The addresses of sockets cannot be stored.
    #[error("cannot store the addresses of the worker's sockets: {0}")]
    Address(std::io::Error),
}

/// A process that has completed the first step of the sandbox.
#[derive(Debug)]
pub struct Sandbox {
    addresses: Addresses,
    /// Keeps in the kernel's cache the inodes to which the rules are bound.
    _files: Option<files::Files>,
}

impl Sandbox {
    /// Restricts the user, capabilities, limits and files of this process, which must have only one thread.
    ///
    /// # Errors
    /// Returns an error if the kernel rejects a restriction.
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
        // If this fails, the OOM killer treats this process like any other.
        let _ = std::fs::write("/proc/self/oom_score_adj", OOM_SCORE);
        let addresses = Addresses::keep(&options.sockets).map_err(SandboxError::Address)?;
        let files = files::restrict(options)?;
        if files.is_none() && options.user.is_none() {
            return Err(SandboxError::NoLandlock);
        }
        Ok(Self { addresses, _files: files })
    }

    /// Forbids all system calls that a worker does not need, in all threads. A worker that makes a forbidden call
    /// reports it over `link` and exits.
    ///
    /// # Errors
    /// Returns an error if the kernel rejects the filter.
    pub fn close(&self, link: BorrowedFd<'_>) -> Result<(), SandboxError> {
        violation::prepare(link, self.addresses).map_err(|error| SandboxError::Step("the signal handler", error))?;
        filter::install(self.addresses).map_err(SandboxError::Filter)
    }
}

/// Sets the connection over which forbidden calls are reported from now on.
pub(crate) fn report_at(link: BorrowedFd<'_>) {
    violation::set_link(link);
}

/// Changes the user ID and the group ID, and removes all supplementary groups.
fn change_user(user: Uid, group: Gid) -> Result<(), SandboxError> {
    let step = |name| move |error| SandboxError::Step(name, error);
    rustix::thread::set_thread_groups(&[]).map_err(step("the removal of groups"))?;
    rustix::thread::set_thread_res_gid(group, group, group).map_err(step("the change of the group"))?;
    rustix::thread::set_thread_res_uid(user, user, user).map_err(step("the change of the user"))?;
    // Changing the user makes the process's own files in /proc unreadable, but the driver needs them.
    let dumpable = rustix::process::DumpableBehavior::Dumpable;
    rustix::process::set_dumpable_behavior(dumpable).map_err(step("the access to the process's own files"))
}

/// Removes all capabilities from the bounding set. This needs CAP_SETPCAP; processes without it are protected by
/// no_new_privs.
fn remove_bounds() {
    for number in 0..=MAX_CAPABILITY {
        let _ = rustix::thread::remove_capability_from_bounding_set(CapabilitySet::from_bits_retain(1 << number));
    }
}

fn drop_capabilities() -> Result<(), Errno> {
    let sets = rustix::thread::capabilities(None)?;
    if [sets.effective, sets.permitted, sets.inheritable].iter().all(|set| set.is_empty()) {
        // Skip the call, because the filter of a systemd service may forbid it.
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
