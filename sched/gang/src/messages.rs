//! Messages between a gang's home and its cards.

use serde::{Deserialize, Serialize};

/// Number of a card, unique on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct CardId(pub u32);

/// Number of a gang, which is the same on all of its cards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct GangId(pub u32);

/// A message about one gang.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// Gang that the message is about.
    pub gang: GangId,
    /// Sender's Lamport clock.
    pub clock: u64,
    /// Report or command.
    pub body: Body,
}

/// Content of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Body {
    /// State of the gang on a card, sent to the home on each change and on request.
    Report {
        /// Number of the last gather, step, or release received.
        round: u64,
        /// State of the gang on the card.
        state: CardState,
        /// True if the gang has work on the card.
        wants: bool,
    },
    /// Command from the home to a card.
    Command {
        /// Number of the gather, step, or release. For `Run` and `Stop`, number of the last such command to the card.
        /// Other commands do not use it.
        round: u64,
        /// Command to execute.
        command: Command,
    },
}

/// State of a gang on a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CardState {
    /// The gang has no member on this card, or the card is unreachable.
    Absent,
    /// The card's accounts have not selected the gang yet.
    Waiting,
    /// The card's accounts have selected the gang.
    Offered,
    /// The card is being gathered, but the turn of another tenant has not ended yet.
    Gathering,
    /// The card is available for the gang.
    Ready,
    /// The card is ready or being gathered for this gang, but an older gang is waiting for it.
    Contested,
    /// The gang's gate is open.
    Running,
    /// The gang has its turn, but its gate is closed because it has no work here.
    Resting,
    /// The gate must close, but work is still in flight.
    Ending,
    /// The gate is closed and all work has ended. The gang keeps the card until its other cards have drained.
    Drained,
    /// Work in flight has not ended for a long time, so other tenants use the card in the meantime.
    Stuck,
}

/// Command of a gang's home to a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Command {
    /// Report the gang's state.
    Report,
    /// The gang must not compete for a turn, because it has no work, or one of its cards has not stopped in time.
    Rest,
    /// The gang must compete for a turn, because it has work on one of its cards.
    Compete,
    /// Make the card available for the gang.
    Gather {
        /// Lamport timestamp of the gang's request. A request with a smaller timestamp is older.
        age: u64,
    },
    /// Open the gate.
    Run,
    /// End the turn, or cancel the gather.
    Stop,
    /// Admit one more submission of each process, because work on another card may wait for it.
    Step,
    /// Release the drained card to other tenants.
    Release,
}
