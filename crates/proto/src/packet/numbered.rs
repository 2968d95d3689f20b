//! What belongs to the messages of one channel that are under way: found by a subtraction.
//!
//! Messages have numbers in a row and end more or less in their order, so these are a few neighbours. A packet looks
//! for its message several times, and a hash of channel and number each time was a tenth of what the protocol takes of
//! a processor.

use std::collections::VecDeque;

/// Values by number. Memory is for the numbers from the least to the greatest that is there.
#[derive(Debug)]
pub struct Numbered<T> {
    first: u64,
    /// Neither the first nor the last is empty. Boxes: an empty place is small.
    slots: VecDeque<Option<Box<T>>>,
    count: usize,
}

impl<T> Default for Numbered<T> {
    fn default() -> Self {
        Numbered {
            first: 0,
            slots: VecDeque::new(),
            count: 0,
        }
    }
}

impl<T> Numbered<T> {
    fn place(&self, number: u64) -> Option<usize> {
        usize::try_from(number.checked_sub(self.first)?).ok()
    }

    /// The value of this number.
    pub fn get(&self, number: u64) -> Option<&T> {
        self.slots.get(self.place(number)?)?.as_deref()
    }

    /// The same, to be changed.
    pub fn get_mut(&mut self, number: u64) -> Option<&mut T> {
        let place = self.place(number)?;
        self.slots.get_mut(place)?.as_deref_mut()
    }

    /// Puts a value there and drops what was there before.
    pub fn insert(&mut self, number: u64, value: T) {
        if self.slots.is_empty() {
            self.first = number;
        }
        while number < self.first {
            self.slots.push_front(None);
            self.first -= 1;
        }
        while self.first + self.slots.len() as u64 <= number {
            self.slots.push_back(None);
        }
        if let Some(place) = self.place(number)
            && let Some(slot) = self.slots.get_mut(place)
        {
            self.count += usize::from(slot.is_none());
            *slot = Some(Box::new(value));
        }
    }

    /// Takes a value out.
    pub fn remove(&mut self, number: u64) -> Option<T> {
        let place = self.place(number)?;
        let value = self.slots.get_mut(place)?.take()?;
        self.count -= 1;
        while let Some(None) = self.slots.front() {
            self.slots.pop_front();
            self.first += 1;
        }
        while let Some(None) = self.slots.back() {
            self.slots.pop_back();
        }
        Some(*value)
    }

    /// Takes all out.
    pub fn clear(&mut self) {
        (self.slots, self.count) = (VecDeque::new(), 0);
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.count
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        #[test]
        fn equals_a_map(steps in prop::collection::vec((0u8..5, 90u64..120), 1..200)) {
            let (mut numbered, mut map) = (Numbered::default(), BTreeMap::new());
            for (at, (kind, number)) in steps.into_iter().enumerate() {
                match kind {
                    0 | 1 => {
                        numbered.insert(number, at);
                        map.insert(number, at);
                    }
                    2 | 3 => prop_assert_eq!(numbered.remove(number), map.remove(&number)),
                    _ => if number == 100 {
                        numbered.clear();
                        map.clear();
                    },
                }
                prop_assert_eq!(numbered.len(), map.len());
                for number in 89..121 {
                    prop_assert_eq!(numbered.get(number), map.get(&number));
                    prop_assert_eq!(numbered.get_mut(number).copied(), map.get(&number).copied());
                }
                let span = map.last_key_value().map_or(0, |last| last.0 + 1 - map.first_key_value().unwrap().0);
                prop_assert_eq!(numbered.slots.len() as u64, span);
            }
        }
    }
}
