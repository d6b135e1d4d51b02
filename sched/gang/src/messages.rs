//! Messages between a gang's home and its cards.

use serde::{Deserialize, Serialize};

/// A card, by a number that is the same for all cards of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct CardId(pub u32);

/// A gang, by a number that is the same on all of its cards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct GangId(pub u32);

/// A message about one gang.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// The gang.
    pub gang: GangId,
    /// Lamport's clock of the sender.
    pub clock: u64,
    /// Content of the message.
    pub body: Body,
}

/// Content of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Body {
    /// State of a card, to the gang's home: after each change, and when the home asks.
    Report {
        /// Number of the last gather, step or release that the card has received.
        round: u64,
        /// State of the gang on this card.
        state: CardState,
        /// True if the gang has work on this card.
        wants: bool,
    },
    /// Command of the home.
    Command {
        /// Its number if it is a gather, a step or a release, and that of the card's last such command otherwise.
        round: u64,
        /// The command.
        command: Command,
    },
}

/// State of a gang on a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CardState {
    /// The gang is not a member on this card, or the card cannot be reached.
    Absent,
    /// Another tenant is next on this card.
    Waiting,
    /// The card's accounts have chosen the gang.
    Offered,
    /// The card is being gathered: another turn has not ended yet.
    Gathering,
    /// The card is free for the gang.
    Ready,
    /// An older gang wants the card, which is being gathered for this gang or ready.
    Contested,
    /// The gang's gate is open.
    Running,
    /// The gang's gate is closed within its turn, for lack of work.
    Resting,
    /// The gate must close, and work is in flight.
    Ending,
    /// The gate is closed and the work has ended; the card is kept until the other cards are as far.
    Drained,
    /// Work in flight has not ended for a long time. Other tenants use the card meanwhile.
    Stuck,
}

/// Command of a gang's home to a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Command {
    /// Report the state.
    Report,
    /// The gang has no work: do not compete for a turn.
    Rest,
    /// The gang has work on one of its cards: compete for a turn.
    Compete,
    /// Free the card for the gang.
    Gather {
        /// Age of the gang's request: the smaller, the older.
        age: u64,
    },
    /// Open the gate.
    Run,
    /// End the turn, or cancel the gather.
    Stop,
    /// Let one more submission of each process pass: work on another card waits for it.
    Step,
    /// Give the drained card to other tenants.
    Release,
}
