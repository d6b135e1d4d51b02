//! The host's own cards and their drivers. These commands work without the daemon.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use admin_client::AskError;
use clap::{Args, Subcommand};
use serde::Serialize;
use vfio_host::bind::{BindError, Change, Kernel};
use vfio_host::{Address, Function, ManagerError, Obstacle, Sysfs};

use super::Form;
use super::client::{Client, ClientError};
use super::output;
use api::ErrorCode;

#[derive(Clone, Debug, Subcommand)]
pub(super) enum HostCommand {
    /// Lists the daemon's cards, or the host's cards
    List {
        /// Lists this host's NVIDIA cards, with their drivers, IOMMU groups, and reasons why the daemon cannot use them
        #[arg(long)]
        host: bool,
        #[command(flatten)]
        place: Place,
    },
    /// Binds a card of this host to vfio-pci, for use by the daemon
    Bind {
        /// PCI address of the card, such as 0000:65:00.0
        address: Address,
        #[command(flatten)]
        place: Place,
    },
    /// Returns a card of this host to its kernel driver
    Unbind {
        /// PCI address of the card, such as 0000:65:00.0
        address: Address,
        /// Driver to bind; by default, the kernel selects the driver
        #[arg(long, value_name = "NAME")]
        driver: Option<String>,
        #[command(flatten)]
        place: Place,
    },
}

#[derive(Clone, Debug, Args)]
pub(super) struct Place {
    /// Root of sysfs, for tests
    #[arg(long, value_name = "PATH", default_value = "/sys", hide = true)]
    sysfs: PathBuf,
}

impl Place {
    fn sysfs(&self) -> Sysfs {
        if self.sysfs == Path::new("/sys") { Sysfs::default() } else { Sysfs::at(&self.sysfs) }
    }
}

/// The host's cards, in the format of `--json`.
#[derive(Clone, Debug, Serialize)]
struct Cards {
    cards: Vec<ManagedCard>,
}

/// An NVIDIA card of the host.
#[derive(Clone, Debug, Serialize)]
struct ManagedCard {
    #[serde(flatten)]
    function: Function,
    /// True if the daemon can use the card.
    usable: bool,
    obstacles: Vec<Hint>,
}

/// Reason why the daemon cannot use a card.
#[derive(Clone, Debug, Serialize)]
struct Hint {
    what: String,
    what_to_do: String,
}

impl From<Function> for ManagedCard {
    fn from(function: Function) -> Self {
        let hint = |obstacle: &Obstacle| Hint { what: obstacle.to_string(), what_to_do: obstacle.what_to_do() };
        let obstacles: Vec<_> = function.obstacles().iter().map(hint).collect();
        Self { function, usable: obstacles.is_empty(), obstacles }
    }
}

impl HostCommand {
    /// Runs the command and returns its output.
    pub(super) fn run(self, client: &Client, form: Form) -> Result<String, ClientError> {
        match self {
            Self::List { host: false, .. } => {
                let list: api::CardList = client.get("/v1/cards")?;
                Ok(form.render_wide(&list, |list, wide| output::cards(&list.cards, wide)))
            }
            Self::List { place, .. } => {
                let functions = place.sysfs().list().map_err(|error| refused(&BindError::Host(error)))?;
                let cards = Cards { cards: functions.into_iter().map(ManagedCard::from).collect() };
                Ok(form.render(&cards, |cards| table(&cards.cards)))
            }
            Self::Bind { address, place } => {
                let change = place.sysfs().bind(&Kernel, address).map_err(|error| refused(&error))?;
                Ok(form.render(&change, changed))
            }
            Self::Unbind { address, driver, place } => {
                let change = place.sysfs().unbind(&Kernel, address, driver.as_deref());
                Ok(form.render(&change.map_err(|error| refused(&error))?, changed))
            }
        }
    }
}

fn refused(error: &BindError) -> ClientError {
    let code = match error {
        BindError::Host(ManagerError::NoFunction(_)) => ErrorCode::NotFound,
        BindError::Foreign { .. } | BindError::NoName(_) => ErrorCode::Invalid,
        BindError::Obstacle(_) | BindError::Lent { .. } | BindError::NoDriver(_) => ErrorCode::Conflict,
        BindError::Host(_) | BindError::Refused { .. } | BindError::Otherwise { .. } => ErrorCode::Failed,
    };
    AskError::Refused(api::Error { code, error: error.to_string(), what_to_do: error.what_to_do() }).into()
}

fn name(driver: Option<&str>) -> &str {
    driver.unwrap_or("no driver")
}

fn changed(change: &Change) -> String {
    let Change { address, before, now } = change;
    let (before, now) = (name(before.as_deref()), name(now.as_deref()));
    if before == now {
        format!("{address} is already bound to {now}\n")
    } else {
        format!("{address} is now bound to {now} instead of {before}\n")
    }
}

fn table(cards: &[ManagedCard]) -> String {
    if cards.is_empty() {
        return "no NVIDIA cards\n".to_owned();
    }
    let mut rows = vec![output::heads(&["ADDRESS", "PCI ID", "DRIVER", "GROUP", "IN THE GROUP", "RESET", "USABLE"])];
    rows.extend(cards.iter().map(|ManagedCard { function, usable, .. }| {
        let or_nothing = |text: String| if text.is_empty() { output::NOTHING.to_owned() } else { text };
        let beside: Vec<_> = function.beside.iter().take(4).map(ToString::to_string).collect();
        vec![
            function.address.to_string(),
            format!("{:04x}:{:04x}", function.vendor, function.device),
            or_nothing(function.driver.clone().unwrap_or_default()),
            or_nothing(function.group.map(|group| group.to_string()).unwrap_or_default()),
            or_nothing(beside.join(", ")),
            or_nothing(function.resets.join(", ")),
            if *usable { "yes" } else { "no" }.to_owned(),
        ]
    }));
    let mut text = output::table(rows, &[]);
    for Hint { what, what_to_do } in cards.iter().flat_map(|card| &card.obstacles) {
        // Writing to a string cannot fail.
        let _ = write!(text, "\n{what}\n  {what_to_do}\n");
    }
    text
}
