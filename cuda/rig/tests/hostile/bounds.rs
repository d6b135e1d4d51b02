//! One message, or one tenant's many messages: nobody else is delayed.
