// asynq: Enqueue from 64 goroutines, as there is no bulk; a server of 100 tasks at a time that looks every 50 ms.
// asynq VERB SOCKET, as shared.py says.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"sync"
	"time"

	"github.com/hibiken/asynq"
)

const (
	atOnce      = 64
	tasksAtOnce = 100
	look        = 50 * time.Millisecond
)

func schedule(redis asynq.RedisClientOpt) error {
	var dueMs []int64
	if err := json.NewDecoder(os.Stdin).Decode(&dueMs); err != nil {
		return err
	}
	client := asynq.NewClient(redis)
	defer client.Close()
	numbers, failed := make(chan int, len(dueMs)), make(chan error, atOnce)
	for number := range dueMs {
		numbers <- number
	}
	close(numbers)
	started := time.Now()
	var tasks sync.WaitGroup
	for range atOnce {
		tasks.Add(1)
		go func() {
			defer tasks.Done()
			for number := range numbers {
				text := fmt.Sprintf("reminder %09d for a customer", number)
				task := asynq.NewTask("remind", []byte(text))
				if _, err := client.Enqueue(task, asynq.ProcessAt(time.UnixMilli(dueMs[number]))); err != nil {
					failed <- err
					return
				}
			}
		}()
	}
	tasks.Wait()
	seconds := time.Since(started).Seconds()
	select {
	case err := <-failed:
		return err
	default:
		return json.NewEncoder(os.Stdout).Encode(map[string]float64{"seconds": seconds})
	}
}

func work(redis asynq.RedisClientOpt) error {
	server := asynq.NewServer(redis, asynq.Config{
		Concurrency:              tasksAtOnce,
		TaskCheckInterval:        look,
		DelayedTaskCheckInterval: look,
		LogLevel:                 asynq.ErrorLevel,
		ShutdownTimeout:          2 * time.Second,
	})
	return server.Run(asynq.HandlerFunc(func(_ context.Context, task *asynq.Task) error {
		_, err := fmt.Fprintf(os.Stdout, "%d %s\n", time.Now().UnixMicro(), task.Payload())
		return err
	}))
}

func main() {
	redis := asynq.RedisClientOpt{Network: "unix", Addr: os.Args[2], PoolSize: atOnce + tasksAtOnce}
	verb := schedule
	if os.Args[1] == "work" {
		verb = work
	}
	if err := verb(redis); err != nil {
		log.Fatal(err)
	}
}
