//! A VM whose programs use CUDA: its function, and its current card.

use std::path::PathBuf;
use std::sync::Arc;

use config::CardSpec;
use cuda_control::Tenant;
use listening::folders;
use locks::{Mutex, rank};
use tenant_move::{Carried, Failure, Owner, VmPlan, carry_vm};
use vcuda::CudaFunction;
use vcuda::users::{self, User, Users};

use crate::{launcher, rejoin_socket, report};

/// A card for VMs whose programs use CUDA.
pub trait HomeCard: Send + Sync {
    /// Returns the configuration of the card.
    fn spec(&self) -> &CardSpec;

    /// Returns the user accounts of the card's workers.
    fn users(&self) -> &Users;

    /// Removes a VM from the tenants of the card's owner, and waits until its workers have exited. Returns true if all
    /// have exited.
    fn leave(&self, vm: &str) -> bool;
}

/// A VM's current card.
struct Home {
    card: Arc<dyn HomeCard>,
    /// Socket of the card's owner for the VM.
    socket: PathBuf,
    /// User account of the workers, unless they run as the daemon's user.
    user: Option<User>,
}

/// A VM whose programs use CUDA.
pub struct CudaVm {
    /// The VM's device.
    pub function: CudaFunction,
    name: String,
    socket_dir: PathBuf,
    home: Mutex<rank::CudaHome, Home>,
}

impl CudaVm {
    /// Creates a VM on a card, whose owner listens on `socket` for the VM. Its workers run as `user`, or as the
    /// daemon's user if `user` is `None`.
    pub fn new(
        function: CudaFunction,
        name: &str,
        card: Arc<dyn HomeCard>,
        (socket, socket_dir): (PathBuf, PathBuf),
        user: Option<User>,
    ) -> Self {
        Self { function, name: name.to_owned(), socket_dir, home: Mutex::new(Home { card, socket, user }) }
    }

    /// Moves the VM to another card. `from` and `to` are the owners of the current and the new card. Calls `moved`,
    /// which records the VM's new card, as soon as its programs continue there.
    ///
    /// # Errors
    /// Returns an error if the move fails. The VM and its programs then continue on their card.
    pub fn move_to(
        &self,
        card: Arc<dyn HomeCard>,
        (from, to): (&dyn Owner, &dyn Owner),
        there: &Tenant,
        moved: impl FnOnce(),
    ) -> Result<Carried, Failure> {
        let socket = there.socket.clone();
        let folder = socket.parent().unwrap_or(&self.socket_dir);
        let user = card.users().reserve(folder).map_err(|error| Failure::Stays(error.to_string()))?;
        let launcher = launcher(card.spec(), &self.name, &socket, user.as_ref());
        let carried = carry_vm(VmPlan { from, to, there }, |bytes| {
            let carried = self.function.carry(Box::new(launcher), bytes, vcuda::CARRY_LIMIT)?;
            let recorded = user.as_ref().map(|user| user.record(folder));
            if let Some(Err(error)) = recorded {
                tracing::error!(vm = self.name, %error, "the next daemon does not know the user of the workers");
            } else if user.is_none() {
                users::forget(folder);
            }
            moved();
            Ok((carried.programs, carried.pause))
        })?;
        report(&self.name, card.spec().cuda().sandbox, user.as_ref().map(User::number));
        *self.home.lock() = Home { card, socket, user };
        Ok(carried)
    }

    /// Removes the VM from its card, with its sockets and the record of its user account.
    pub fn release(&self) {
        let (card, socket) = {
            let home = self.home.lock();
            (Arc::clone(&home.card), home.socket.clone())
        };
        // Remove this socket first, because only an empty folder can be removed.
        let _ = std::fs::remove_file(rejoin_socket(&socket));
        let has_left = card.leave(&self.name);
        if let Some(user) = self.home.lock().user.as_ref().filter(|_| !has_left) {
            tracing::error!(user = user.number(), "no other VM gets this user until the daemon is restarted");
            user.keep();
        }
        socket.parent().into_iter().for_each(users::forget);
        folders::remove(&self.name, &socket, &self.socket_dir);
    }
}
